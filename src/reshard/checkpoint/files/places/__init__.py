"""Places: checkpoints at URLs, read as if they were folders, and written in parts.

object_source   what a place answers: objects, folders, ranges of bytes; buckets, web servers
hub             models of the Hugging Face Hub, as such a source
place           one bucket, server or model, and what was seen of it
place_path      a path in a place, with the methods of `pathlib.Path` that read
place_file      an object that is read by many threads, as `SourceFile` reads files
ahead_reads     small ranges of many objects, asked for together
stores/         what is written to
part_grid       the parts of files, and which of them a range touches
part_sender     parts that are sent while others are read and written
spool           where parts wait on this machine until a store has them
abandoned       uploads that did not end
upload          files on their way to a store, found again by their `upload_marker`

    s3://bucket/model/step-10/model.safetensors
    ----------- ----------------------------------
    the place   the key of an object in it
"""
