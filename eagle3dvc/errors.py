"""The one exception a user is meant to read."""


class UserError(Exception):
    """Wrong input or a condition the user must act on.

    The message is one sentence that says what is wrong, where (file, row, parameter), and what to do.
    Stages and the command line print it on standard error and exit with status 1, without a traceback.
    """


def yaml_problem(e: Exception) -> str:
    """Where a YAML file is wrong and how, in one line: a duplicate key is named."""
    mark = getattr(e, "problem_mark", None)
    problem = " ".join((getattr(e, "problem", None) or str(e).splitlines()[0]).split())
    return f"line {mark.line + 1}: {problem}" if mark else problem
