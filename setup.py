"""The metadata stand in setup.cfg; here is what setup.cfg cannot say."""

from setuptools import find_packages, setup


def packages() -> list[str]:
    """All packages that are installed, found in the directories that they really lie in.

    In a checkout hvdgloo/rendezvous and hvdgloo/runner are links to the directories next to hvdgloo; a source
    distribution has no links. Found this way, both give the same packages.
    """
    names = set(find_packages(include=["hvdgloo", "hvdgloo.*"]))
    for folder in ("rendezvous", "runner"):
        names |= {f"hvdgloo.{folder}", *(f"hvdgloo.{folder}.{name}" for name in find_packages(folder))}
    return sorted(names)


setup(packages=packages())
