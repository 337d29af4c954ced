def get_device_uuid(number: int) -> str:
    return f"cpu:{number}"
