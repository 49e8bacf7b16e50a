"""What developers run: ``nox -s tests | gpu | lint | docs | bench`` (``pipx install nox``)."""

import nox

nox.options.sessions = ["lint", "tests"]
nox.options.reuse_existing_virtualenvs = True


def _install(session: nox.Session, extra: str) -> None:
    session.install("-c", "constraints.txt", "-e", f".[{extra}]")


@nox.session
def tests(session: nox.Session) -> None:
    """The tests that CI runs."""
    _install(session, "dev")
    session.run("python", "-m", "pytest", "-n", "2", "--dist", "worksteal", *session.posargs)


@nox.session(venv_backend="none")
def gpu(session: nox.Session) -> None:
    """The tests that need a GPU, with the torch that is installed here."""
    session.run("python", "-m", "pytest", "-m", "gpu and not slow", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Style and types."""
    _install(session, "dev")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")


@nox.session
def docs(session: nox.Session) -> None:
    """The site, in site/; ``nox -s docs -- serve`` shows it."""
    _install(session, "docs")
    session.run("mkdocs", *(session.posargs or ["build"]))


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """The inference suite, in eight minutes on a GPU, with the torch that is installed here."""
    arguments = session.posargs or ["inference", "--minutes", "8", "--out", "inference.json"]
    session.run("python", "-m", "benchmarks", "run", *arguments)
