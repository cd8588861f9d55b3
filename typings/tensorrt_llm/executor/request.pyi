# Origin: executor/request.py, 08c3313049a824d5b4dd95e296f129f00b8b3884. `lora_path` must exist, otherwise ValueError.
# `lora_ckpt_source` is newer (reference, section 3) and not used.
class LoRARequest:
    def __init__(self, lora_name: str, lora_int_id: int, lora_path: str = "") -> None: ...
