"""The one exception a user is meant to read."""


class UserError(Exception):
    """Wrong input or a condition the user must act on.

    The message is one sentence that says what is wrong, where (file, row, parameter), and what to do.
    Stages and the command line print it on standard error and exit with status 1, without a traceback.
    """
