"""`python -m bench.gateway`."""

from bench.gateway.direct import main

if __name__ == "__main__":
    raise SystemExit(main())
