"""`python -m bench.wheelhouse`."""

from bench.wheelhouse.collecting import main

if __name__ == "__main__":
    raise SystemExit(main())
