"""What was installed, looked at before anything of it is imported."""

from importlib import metadata


def check_haliax_distribution() -> None:
    """Refuses the distribution `haliax` where its successor `marin-haliax` belongs.

    Both install the package `haliax` and overwrite each other's files, and neither pip nor the
    import notices: which of the two is in the files is the order of installation. The old one
    imports, and then fails inside a stack on any JAX of 0.11 or newer.

    Raises:
        ImportError: `haliax` is installed, beside `marin-haliax` or without it. The message
            holds the command that cures it.

    Example:
        >>> from stackax._install import check_haliax_distribution
        >>> check_haliax_distribution()
    """
    if not _is_installed("haliax"):
        return
    beside = " beside 'marin-haliax'" if _is_installed("marin-haliax") else ""
    raise ImportError(
        f"The distribution 'haliax' is installed{beside}. stackax needs 'marin-haliax', its "
        "maintained successor: both provide the package 'haliax' and overwrite each other's "
        "files. To leave only the one that works, run\n\n"
        "    pip uninstall -y haliax && pip install --force-reinstall --no-deps marin-haliax\n"
    )


def _is_installed(distribution: str) -> bool:
    try:
        metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True
