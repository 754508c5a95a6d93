"""In which types things are computed."""
