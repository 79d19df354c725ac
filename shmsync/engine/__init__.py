"""One writer and many readers of one arena: Publisher, Subscriber, and the modules that are bound to them.

What a layer above may use is spelled without an underscore. docs/glossary.md has the words: section, pin, ack.
May be imported by workers, schemes, collectors, integrations, cli and metrics.
"""
