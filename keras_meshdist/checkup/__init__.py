"""`doctor`: is this a place where training will go right?"""

from keras_meshdist.checkup.examination import doctor

__all__ = ["doctor"]
