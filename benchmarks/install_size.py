"""Size on disk of the base install and of the extra local, as `make wheel` installed them: python benchmarks/install_size.py"""

from pathlib import Path

SCRATCH = Path(__file__).resolve().parent.parent / ".scratch"
#: What `python -m venv` puts there by itself.
NOT_OURS = {"pip", "setuptools", "pkg_resources", "_distutils_hack"}
LARGEST = 6


def sizes(site_packages: Path) -> dict[str, int]:
    """Bytes by package; `numpy.libs` counts for `numpy`, and metadata for nothing else."""
    found: dict[str, int] = {}
    for entry in site_packages.iterdir():
        name = entry.name.partition(".")[0].partition("-")[0]
        if name not in NOT_OURS:
            files = entry.rglob("*") if entry.is_dir() else [entry]
            found[name] = found.get(name, 0) + sum(
                file.stat().st_blocks * 512 for file in files if file.is_file()
            )
    return found


def main() -> None:
    for kind in ("base", "local"):
        homes = sorted(
            SCRATCH.glob(f"wheel-{kind}-*/.ready"), key=lambda file: file.stat().st_mtime
        )
        if not homes:
            print(f"{kind}: not installed; run make wheel")
            continue
        (site_packages,) = homes[-1].parent.glob("lib/python*/site-packages")
        found = sizes(site_packages)
        largest = sorted(found.items(), key=lambda item: -item[1])[:LARGEST]
        parts = ", ".join(f"{name} {size / 2**20:.0f}" for name, size in largest)
        print(f"{kind}: {sum(found.values()) / 2**20:,.0f} MB, of which {parts}")


if __name__ == "__main__":
    main()
