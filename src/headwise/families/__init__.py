"""The only room that knows architectures: families as data, attention weights in one view, reduced models, files."""
