"""Per engine: how it is started and asked, and its own ways of updating weights."""
