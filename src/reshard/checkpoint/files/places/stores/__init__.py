"""Stores that are written to.

object_target   what a store does for who writes: objects in parts
s3_target       buckets of Amazon S3, by boto3; azure_target and gcs_target, of Azure and Google
target_stores   which of them an address is of
"""
