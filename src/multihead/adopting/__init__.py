"""Other projects' attention layers, read, proven and put to use."""
