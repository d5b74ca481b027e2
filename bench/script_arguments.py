"""Arguments that scripts of bench/ have in common."""

import argparse

SKIPPED = 77  # how a script ends where something is not there that it needs


def parser_of(text):
    """A parser whose help is `text`, lines as they are."""
    return argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)


def numbers(text):
    """Of an option: whole numbers between commas."""
    return [int(word) for word in text.split(",")]


def command_of(script, words):
    """The command that rows keep, without the options that name their file and commit."""
    own = {"--json", "--commit"}
    kept = [word for i, word in enumerate(words)
            if word.split("=")[0] not in own and (i == 0 or words[i - 1] not in own)]
    return " ".join([script, *kept])
