"""One file a kernel, all alike: refuses(spec) → reason or None; quadratic_bytes(spec); run(q, k, v, spec) → out, lse."""
