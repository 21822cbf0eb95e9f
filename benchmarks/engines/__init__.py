"""What differs between engines: how one is started and asked, and the ways it has of its own."""
