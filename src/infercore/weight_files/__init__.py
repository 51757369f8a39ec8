"""Files of weights as others write them, for plugins whose engine does not read them itself.

- `gguf.read`: the header of a GGUF file;
- `safetensors.read`: the tensors of a safetensors file;
- `lora.read`: a LoRA adapter in either, by the names of the model's matrices.
"""
