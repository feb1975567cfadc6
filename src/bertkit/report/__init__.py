"""Pages that show runs to people: `bertkit report`."""
