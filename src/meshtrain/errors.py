"""The exceptions that meshtrain raises on purpose. Each message names the thing, the value, the rule and the way out."""


class MeshtrainError(RuntimeError):
    """Base of every error that meshtrain raises on purpose."""


class Refused(MeshtrainError, ValueError):
    """Bad input (a flag, plan, mesh, file or config), found before anything was started. Exit status 2."""


class Damaged(Refused):
    """A file is not what was written: damaged since, truncated, or mixed up with another."""


class ContractError(MeshtrainError):
    """The API was used against its contract, in a way that would otherwise train silently wrong."""
