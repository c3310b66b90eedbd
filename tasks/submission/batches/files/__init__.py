"""Files that a batch reads and writes. Each line may import what stands below it.

storage  files by their location: a path, or a URL that fsspec reads and writes
roots    which files may be opened: a worker opens those below its roots alone
"""
