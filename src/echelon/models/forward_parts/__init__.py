"""Parts of a module's forward that run alone, and copies of modules without memory."""
