"""Hooks into the engines: what is common to all of them (`front`, `rank`, `touch`, ...), and a room for each engine."""
