"""From a model and a plan to the reduced model; one folder for each kind of reduction."""
