"""Other projects' own interfaces, for real: what `make test-integrations` runs, each in the environment that it needs."""
