"""Azure and Google Cloud Storage: what is written there is read, and goes on after a kill."""
