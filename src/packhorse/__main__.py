"""`python -m packhorse` is the `packhorse` command."""

from packhorse.cli.main import main

if __name__ == "__main__":
    main()
