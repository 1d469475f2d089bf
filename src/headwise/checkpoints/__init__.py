"""Model folders: opened, checked, saved, proved to open again."""
