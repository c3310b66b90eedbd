"""`python -m bench.scheduler`."""

from bench.scheduler.costs import main

if __name__ == "__main__":
    main()
