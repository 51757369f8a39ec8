"""An infercore backend over `openvino_genai.ContinuousBatchingPipeline`, which shows no logits."""
