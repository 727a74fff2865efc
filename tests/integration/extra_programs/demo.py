"""`penstock[demo]`: the demo reads a user's file and names a missing column before it starts a service."""

import subprocess
import sys
from pathlib import Path


def main(folder: Path) -> None:
    (folder / "clicks.csv").write_text("user,at\nann,2024-05-01T10:00:00Z\n")
    command = [str(Path(sys.executable).with_name("penstock")), "demo", "--input", "clicks.csv"]
    given = ["--key", "user", "--time", "when", "--gap", "30m"]
    done = subprocess.run([*command, *given], cwd=folder, capture_output=True, text=True, check=False)
    print(done.returncode, done.stderr)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
