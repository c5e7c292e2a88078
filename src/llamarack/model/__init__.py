"""What a model's files say: dimensions, sizes, tokenizer, template. Reads headers, never weights.

- `spec`: the records
- `read`: any path -> ModelSpec, foreign files named
- `gguf_header`, `gguf`, `ggml_types`: GGUF files and split sets
- `huggingface`, `safetensors`, `quantization`, `json_file`: Hugging Face folders
- `tokenizer`, `tokenizer_files`, `sentencepiece`: who the tokenizer is
- `identity`, `check`: does the tokenizer belong to the weights?
- `completeness`: are all bytes there, and the ones that were published?
"""
