"""The `tinkex` command. Groups load when they are used."""
