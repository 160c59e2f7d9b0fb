"""The digest of a program: ranks compare it before step 1, a proof names it.

In: a program. Out: 32 hexadecimal digits, equal for equal programs only.
"""

from __future__ import annotations

from hashlib import blake2b

from packhorse.program.program import Program
from packhorse.program.text import format_program


def digest_program(program: Program) -> str:
    """Digest a program: BLAKE2b of its text, 16 bytes, in hexadecimal."""
    return blake2b(format_program(program).encode(), digest_size=16).hexdigest()
