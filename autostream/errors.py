"""The exceptions that autostream raises.

    AutostreamError
    ├── OptionError (ValueError)    an option has a value that is not allowed
    ├── TargetError (ValueError)    a model, TARGET or input specification cannot be used
    ├── CostError (ValueError)      costs or a device profile cannot be used
    ├── TraceError                  a model cannot be turned into a dataflow graph
    │   └── FastPathError           … and graphs between graph breaks would not compute the same either
    ├── FusionError                 a program's ops cannot be fused into kernels
    ├── ScheduleError               a schedule failed verification; it was not executed
    ├── CaptureError                a schedule cannot be captured into a CUDA graph
    ├── GroupError                  processes of a group would not launch the same collectives
    └── MismatchError               a scheduled call did not compute what the model computes

``OptionError``, ``TargetError`` and ``CostError`` are mistakes of the caller and always raised, and so is
``GroupError``, after which the processes would wait for each other for ever; ``MismatchError`` is raised with
``AUTOSTREAM_VERIFY=paranoid``. The others are caught by :func:`autostream.optimize`, which falls back and
reports why, unless ``strict=True``. A ``FusionError`` is always caught: the program then runs without fused kernels.
"""


class AutostreamError(Exception):
    """The base class of all exceptions of autostream."""


class OptionError(AutostreamError, ValueError):
    """An option has a value that is not allowed; the message names the allowed values."""


class TargetError(AutostreamError, ValueError):
    """A model, a TARGET or an input specification cannot be used; the message says what to write instead."""


class CostError(AutostreamError, ValueError):
    """Costs or a device profile are of another device or version, or have invalid values."""


class TraceError(AutostreamError):
    """A model cannot be turned into a dataflow graph; the message says why."""


class FastPathError(TraceError):
    """A model has side effects that no graph repeats; the message names them."""


class FusionError(AutostreamError):
    """A program's ops cannot be fused into kernels; the message says why. They are scheduled as they are."""


class ScheduleError(AutostreamError):
    """A schedule leaves a hazard uncovered; the message names both ops. It was not executed."""


class CaptureError(AutostreamError):
    """A schedule cannot be captured into a CUDA graph; the message names the op and the user's source line."""


class GroupError(AutostreamError, RuntimeError):
    """Processes of a group would not launch the same collectives, or one is gone; the message names the rank.

    What recovers from a failed collective catches a ``RuntimeError``.
    """


class MismatchError(AutostreamError):
    """A scheduled call did not compute what the model computes; the message says where and by how much they differ."""


def first_line(error: BaseException) -> str:
    r"""An exception in one line: those of PyTorch run to pages.

    Example:
        >>> first_line(RuntimeError("\nno kernel\nlong story"))
        'RuntimeError: no kernel'
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # A line that ends with a colon is continued: "LoweringException: UserWarning:" alone says nothing.
    count = next((count for count, line in enumerate(lines, 1) if not line.endswith(":")), len(lines))
    return " ".join([f"{type(error).__name__}:", *lines[:count]]) if lines else type(error).__name__


def a_type(value: object) -> str:
    """The type of a value with an article, for messages.

    Example:
        >>> a_type([]), a_type(2)
        ('a list', 'an int')
    """
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def shown(value: object) -> str:
    """A value for a message of one line: its repr if that is short, else its type.

    Example:
        >>> shown(3), shown([None] * 100)
        ('3', 'a list')
    """
    text = repr(value)
    return text if len(text) <= 200 and "\n" not in text else a_type(value)
