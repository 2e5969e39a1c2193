"""Word lists that the generated tasks draw from. Data only."""

# ruff: noqa: SIM905, a list of words reads best as a sentence

from typing import Final

NAMES: Final = (
    "Anna Ben Clara David Emma Felix Grace Henry Iris Jack Kate Leo Maria Noah Olivia Paul Rosa Sam Tina Victor "
    "Alice Bruno Carla Daniel Elena Frank Hanna Ivan Julia Karl Lena Martin Nina Oscar Peter Ruth Sofia Tom Vera Will"
).split()
FEMALE: Final = frozenset(
    "Anna Clara Emma Grace Iris Kate Maria Olivia Rosa Tina Alice Carla Elena Hanna Julia Lena Nina Ruth Sofia Vera".split()
)
ANIMALS: Final = (
    "fox bear cat dog rabbit mouse owl horse duck wolf frog goat lion tiger hen bee crow deer pig sheep snail turtle "
    "donkey goose hedgehog squirrel sparrow whale ant spider"
).split()
OBJECTS: Final = (
    "key book lamp box map bell coin stone rope basket letter hat ring cup clock boat kite shell drum mirror candle "
    "bottle wheel ladder blanket chair table spoon button feather"
).split()
FRUITS: Final = "apple pear plum cherry lemon orange peach melon grape fig banana mango".split()
FOODS: Final = "bread cheese soup cake honey rice milk tea butter salad pasta jam".split()
COLOURS: Final = "red blue green yellow white black brown grey pink purple orange gold".split()
PLACES: Final = (
    "forest river village garden mountain castle market lake bridge farm harbour meadow tower cave school island mill "
    "library valley beach"
).split()
CITIES: Final = (
    "Paris London Rome Berlin Madrid Vienna Oslo Lisbon Prague Dublin Athens Cairo Tokyo Delhi Boston Chicago Toronto "
    "Sydney Lima Nairobi"
).split()
JOBS: Final = (
    "baker doctor teacher farmer painter sailor nurse tailor writer miller pilot engineer singer cook".split()
)
ADJECTIVES: Final = (
    "small old brave clever kind quiet lazy happy hungry tired young gentle proud curious lonely cheerful careful "
    "strong shy busy"
).split()
LOOKS: Final = "shiny tiny heavy broken golden wooden round strange lost dusty smooth silver".split()
WORDS: Final = (
    "sun moon star rain snow wind cloud fire water earth leaf tree flower grass seed root branch bird fish hand foot "
    "head heart eye ear door window wall roof floor house street road path field hill sea ship train car light night "
    "day morning evening summer winter spring autumn song dance story game friend family mother father sister brother "
    "child king queen gold iron glass paper silk wool salt sugar bread egg corn green slow fast warm cold deep high "
    "low soft hard sweet bitter open close early late north south east west"
).split()
VERBS: Final = "walk run jump sing read write swim climb cook draw dance sleep wait listen look think".split()

NUMBER_WORDS: Final = (
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen "
    "nineteen twenty"
).split()

SEQUENCES: Final = (
    "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split(),
    "January February March April May June July August September October November December".split(),
    list("abcdefghijklmnopqrstuvwxyz"),
    list("ABCDEFGHIJKLMNOPQRSTUVWXYZ"),
    NUMBER_WORDS,
    "first second third fourth fifth sixth seventh eighth ninth tenth".split(),
    "spring summer autumn winter".split(),
    "Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune".split(),
    "red orange yellow green blue indigo violet".split(),
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu".split(),
    "ten twenty thirty forty fifty sixty seventy eighty ninety".split(),
    "I II III IV V VI VII VIII IX X".split(),
)

CAPITALS: Final = {
    "France": "Paris", "England": "London", "Italy": "Rome", "Germany": "Berlin", "Spain": "Madrid",
    "Austria": "Vienna", "Norway": "Oslo", "Portugal": "Lisbon", "Ireland": "Dublin", "Greece": "Athens",
    "Egypt": "Cairo", "Japan": "Tokyo", "Peru": "Lima", "Kenya": "Nairobi", "Poland": "Warsaw",
    "Sweden": "Stockholm", "Russia": "Moscow", "China": "Beijing", "Canada": "Ottawa", "Cuba": "Havana",
}  # fmt: skip
OPPOSITES: Final = {
    "hot": "cold", "big": "small", "up": "down", "day": "night", "fast": "slow", "old": "new", "open": "closed",
    "high": "low", "good": "bad", "light": "dark", "left": "right", "happy": "sad", "hard": "soft", "wet": "dry",
    "early": "late", "strong": "weak", "long": "short", "full": "empty", "rich": "poor", "black": "white",
}  # fmt: skip
SOUNDS: Final = {
    "cow": "moo", "dog": "woof", "cat": "meow", "duck": "quack", "sheep": "baa", "lion": "roar", "frog": "croak",
    "bee": "buzz", "pig": "oink", "owl": "hoot", "horse": "neigh", "hen": "cluck",
}  # fmt: skip
THING_COLOURS: Final = {
    "the sky": "blue", "grass": "green", "snow": "white", "coal": "black", "a lemon": "yellow", "a cherry": "red",
    "the sea": "blue", "milk": "white", "an orange": "orange", "a plum": "purple", "a leaf": "green", "honey": "gold",
}  # fmt: skip
