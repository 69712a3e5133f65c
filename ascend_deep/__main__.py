"""``python -m ascend_deep``: the command line."""

from ascend_deep.cli import main

if __name__ == "__main__":
    main()
