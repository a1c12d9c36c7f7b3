"""The command `frankenstein`. Each subcommand imports what it needs when it runs, so that help costs nothing."""
