"""Archives of torch.save in another form."""

from __future__ import annotations

import io
import zipfile


def compressed(content: bytes) -> bytes:
    """What torch.save wrote, with its entries compressed; torch.load reads it all the same."""
    packed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
    return packed.getvalue()
