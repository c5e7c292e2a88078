"""What a model's files say: dimensions, sizes, tokenizer, template. Reads headers, never weights.

- `spec`: the records
"""
