"""Our parts in other projects' places: one file each. A file imports its project, so none is imported unless it is named."""
