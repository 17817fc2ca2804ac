"""Places: checkpoints at URLs, read as if they were folders.

object_source   what a place answers: objects, folders, ranges of bytes; buckets, web servers
hub             models of the Hugging Face Hub, as such a source
place           one bucket, server or model, and what was seen of it
place_path      a path in a place, with the methods of `pathlib.Path` that read
place_file      an object that is read by many threads, as `SourceFile` reads files

    s3://bucket/model/step-10/model.safetensors
    ----------- ----------------------------------
    the place   the key of an object in it
"""
