"""The exceptions that mean: the user's input is wrong, and this sentence says how."""


class InputError(ValueError):
    """Wrong input. The message is a whole sentence for the user; the command line prints it and exits with 2."""


class BudgetError(InputError):
    """A budget that no plan can keep to."""
