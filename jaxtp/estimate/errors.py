"""What can go wrong beside a user's mistakes."""


class TargetError(RuntimeError):
    """The compiler for a target is missing, crashed, took too long, or says that the program cannot run there."""


class DoesNotFitError(TargetError):
    """The compiler for a target says that its memory does not hold the program."""
