"""flowalign: align text-to-image and text-to-video flow models with rewards."""

__version__ = "0.1.0"
