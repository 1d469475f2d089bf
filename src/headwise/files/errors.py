"""The exceptions that are for the user: wrong input, or work that failed; each is one sentence."""


class InputError(ValueError):
    """Wrong input. The message is a whole sentence for the user; the command line prints it and exits with 2."""


class BudgetError(InputError):
    """A budget that no plan can keep to."""


class Failed(RuntimeError):
    """The input was right and the work still failed. A whole sentence; the command line prints it and exits with 1."""
