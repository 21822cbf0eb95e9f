"""What the processor of SmolVLM asks for, to write the times of a video in words; no test shows it one."""


def num2words(number: object) -> str:
    return str(number)
