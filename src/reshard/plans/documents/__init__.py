"""JSON documents of layouts, plans and jobs. Start at `serialization` (`to_json`, `from_json`)."""
