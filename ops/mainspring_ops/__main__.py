"""`python -m mainspring_ops` is the `mainspring` command of this very interpreter."""

from mainspring_ops.cli import main

if __name__ == "__main__":
    main()
