"""A file is checked in a process of its own, whose time and memory are watched: a limit against accidents, not a sandbox."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from .mistakes import CATALOGUE, Text
from .report import Finding, Report, Reports
from .source import Place

SECONDS, GIB = 60.0, 2.0  # the whole check, and its resident memory
IMPORT = 10.0  # seconds without a word while the file is imported
MARK = "MULTIHEAD_CHECK"
KEPT = 4_000  # characters that a file prints are kept for the report


@dataclass
class Heard:
    """What came from the child."""

    at: int = 0
    on: str = ""
    reports: list[Report] = field(default_factory=list[Report])
    findings: list[Finding] = field(default_factory=list[Finding])
    imported: bool = False
    ended: bool = False
    stopped: str = ""  # "time", "import", "memory" or what it died of
    printed: str = ""
    peak: float = 0.0


def run_file(target: str, init: dict[str, Any] | None = None, seconds: float = SECONDS, gib: float = GIB) -> Reports:
    """The reports on FILE.py, FILE.py:Name, package.module or package.module:Name."""
    file, module, name = parse(target)
    spec = {"file": file, "module": module, "name": name, "init": init, "definitions_only": False}
    heard = _watch(spec, seconds, gib)
    extra: list[Finding] = []
    if file and not heard.imported and heard.stopped:
        extra = [_stopped(heard, file, seconds, gib)]
        heard = _watch({**spec, "definitions_only": True}, seconds, gib)
    return _reports(heard, extra, file or module, seconds, gib)


def parse(target: str) -> tuple[str, str, str]:
    """(file, module, name) of a target; a drive's colon on Windows is none."""
    head, colon, name = target.rpartition(":")
    if not colon or (len(head) == 1 and name[:1] in "\\/"):
        head, name = target, ""
    if head.endswith(".py") or os.path.sep in head or Path(head).exists():
        path = Path(head)
        if not path.is_file():
            raise ValueError(
                f"check: needs a file, FILE.py or FILE.py:Name; {head} is {'a folder' if path.is_dir() else 'not there'}"
            )
        return str(path.resolve()), "", name
    if not all(part.isidentifier() for part in head.split(".")):
        raise ValueError(f"check: needs FILE.py, FILE.py:Name or package.module:Name; it is {target!r}")
    return "", head, name


# ---- watching -------------------------------------------------------------------------------------------------------


def _watch(spec: dict[str, Any], seconds: float, gib: float) -> Heard:
    heard, mark = Heard(), uuid.uuid4().hex
    read, write = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "multihead.checking.child", json.dumps(spec), str(write)],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, pass_fds=(write,), start_new_session=True,
        env={**os.environ, MARK: mark, "PYTHONIOENCODING": "utf-8", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )  # fmt: skip
    os.close(write)
    try:
        if process.stdout is not None:
            _listen(process, os.fdopen(read, "rb"), process.stdout, heard, seconds, gib)
    finally:
        _end(process, mark)
    return heard


def _listen(
    process: subprocess.Popen[bytes], channel: IO[bytes], printed: IO[bytes], heard: Heard, seconds: float, gib: float
) -> None:
    """Until it ends, or goes beyond a limit."""
    start, rest = time.monotonic(), b""
    word = start
    with channel, printed, selectors.DefaultSelector() as selector:
        for stream in (channel, printed):
            os.set_blocking(stream.fileno(), False)
            selector.register(stream, selectors.EVENT_READ)
        while channel in {key.fileobj for key in selector.get_map().values()} and not heard.ended:
            for key, _ in selector.select(0.02):
                data = os.read(key.fd, 1 << 16)
                if not data:
                    selector.unregister(key.fileobj)
                elif key.fileobj is printed:
                    heard.printed = (
                        (heard.printed + data.decode("utf-8", "replace"))[:KEPT] if len(heard.printed) < KEPT else heard.printed
                    )
                else:
                    *lines, rest = (rest + data).split(b"\n")
                    word = time.monotonic()
                    for line in lines:
                        _hear(heard, line)
            now = time.monotonic()
            heard.peak = max(heard.peak, resident(process.pid))
            if heard.peak > gib:
                heard.stopped = "memory"
            elif now - start > seconds:
                heard.stopped = "time"
            elif heard.at and not heard.imported and now - word > min(IMPORT, seconds):
                heard.stopped = "import"
            if heard.stopped:
                return
    if not heard.ended:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
        heard.stopped = _death(process.poll())


def _hear(heard: Heard, line: bytes) -> None:
    try:
        said: dict[str, Any] = json.loads(line)
    except ValueError:  # somebody else wrote into the channel
        return
    heard.at, heard.on = said.get("at", heard.at), said.get("on", heard.on)
    heard.ended |= "end" in said
    if "findings" in said:
        heard.imported = True
        heard.findings = Report.of({**Report("").data(), "findings": said["findings"]}).findings
    if "report" in said:
        heard.reports.append(Report.of(said["report"]))


def _death(status: int | None) -> str:
    if status is None:
        return "closed"
    if status < 0:
        return f"signal {signal.Signals(-status).name}" if -status in {s.value for s in signal.Signals} else f"signal {-status}"
    return f"exit {status}"


def resident(group: int) -> float:
    """GiB of resident memory of a process group, where the system tells."""
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[2]) == group:
                total += int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
    return total / 2**30


def _end(process: subprocess.Popen[bytes], mark: str) -> None:
    """End it and whatever it started, also what left its group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pid in _marked(mark):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _marked(mark: str) -> Iterator[int]:
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in environ.read_bytes():
                yield int(environ.parent.name)


# ---- what it comes to -------------------------------------------------------------------------------------------------


def _stopped(heard: Heard, file: str, seconds: float, gib: float) -> Finding:
    """The finding about a child that did not come to its end."""
    line = max(heard.at, 1)
    rows = Path(file).read_text("utf-8", "replace").splitlines() if file else []
    row = rows[line - 1] if line <= len(rows) else ""
    said = {
        "memory": Text(f"more than {gib:g} GiB of memory", f"内存超过 {gib:g} GiB"),
        "time": Text(f"more than {seconds:g} s", f"超过 {seconds:g} 秒"),
        "import": Text(
            f"the import did not go on within {min(IMPORT, seconds):g} s", f"导入时 {min(IMPORT, seconds):g} 秒没有进展"
        ),
    }.get(heard.stopped, Text(f"the process ended with {heard.stopped}", f"进程结束：{heard.stopped}"))
    if heard.imported:
        said = Text(f"{said.en}, while {heard.on} was checked", f"{said.zh}，当时正在检查 {heard.on}")
        return Finding("limit", CATALOGUE["limit"].level, True, said, None)
    name = "limit" if heard.stopped in ("memory", "time") else "import_runs"
    return Finding(name, CATALOGUE[name].level, True, said, Place(file, line, line, row) if file else None)


def _reports(heard: Heard, extra: list[Finding], target: str, seconds: float, gib: float) -> Reports:
    findings = [*extra, *heard.findings]
    if heard.stopped and not heard.ended:
        findings.append(_stopped(heard, target if target.endswith(".py") else "", seconds, gib))
    reports = heard.reports
    if not reports or findings:
        reports = [Report(Path(target).name, target, findings=findings), *reports]
    if not heard.reports and not findings:
        said = "nothing in it looks like attention; name it: FILE.py:Name", "里面没有像注意力的类或函数；请指明：FILE.py:Name"
        reports[0].findings.append(Finding("not_built", "wrong", True, Text(*said)))
    return Reports(reports)
