"""The files of a checkpoint: data files, manifest, commit and examination."""

from __future__ import annotations

from fullshard.checkpoint.format import committing, datafile
from fullshard.checkpoint.format.committing import (
    flush_folder,
    make_folder,
    publish,
    refuse_name,
    seal,
    supersede,
    unfinished_at,
    write_flushed,
)
from fullshard.checkpoint.format.datafile import (
    BLOCK_NBYTES,
    CHUNK_NBYTES,
    Bytes,
    DataFile,
    DataWriter,
    ObjectFile,
    Parts,
    bytes_of,
    digests_of_blocks,
    dtype_of,
    flat_bytes,
    memory_of,
    name_of,
)
from fullshard.checkpoint.format.examine import (
    ASIDE_OBJECT,
    DATA_OBJECT,
    CheckpointInfo,
    Looked,
    Numbered,
    TensorInfo,
    complete,
    contained,
    described,
    faults,
    in_folder,
    inspect,
    latest,
    list_checkpoints,
    look,
    numbered,
    numbered_names,
    present,
    read_manifest,
    verify,
)
from fullshard.checkpoint.format.manifest import (
    MANIFEST,
    Contents,
    FileInfo,
    FilePart,
    Manifest,
    digest_of,
)
from fullshard.checkpoint.format.placement import Grid, TensorEntry
from fullshard.checkpoint.format.places import (
    AnyPlace,
    NewFile,
    ObjectUrl,
    Place,
    folder_of,
    new_file,
    place_of,
)
from fullshard.checkpoint.format.values import decode, encode
