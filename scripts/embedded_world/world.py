"""The small world that the embedded corpus and tasks speak of: things and materials, animals, jobs, daily scripts.

Everything is fixed data or drawn once with a fixed seed, so the world is the same on every machine. What a thing does
when it is dropped, wetted, burnt, pressed or blown at follows from its material; the material itself, the colour and
the room must be known by heart. Scripts share their steps, so the next step follows from the activity and the last
step together.
"""

from __future__ import annotations

import hashlib
import random


def _words(text: str, separator: str = " ") -> list[str]:
    return text.split(separator)


SHE = _words("anna emma lucy maria nina rosa sara tina julia clara helen lena")
HE = _words("ben carl david eric felix henry jack leo max oscar paul tom")
NAMES = tuple(SHE + HE)
PRONOUN = {name: "she" for name in SHE} | {name: "he" for name in HE}

COLORS = _words("red blue green yellow black white brown pink")
ROOMS = _words("kitchen bedroom garden school shop office garage attic cellar hall")

OBJECTS_BY_MATERIAL = {
    "wood": _words("chair table bench shelf ladder bat barrel stick drum cart log crate stool oar plank wheel"),
    "stone": _words("brick rock pebble statue tile pillar slab tomb mill block arch curb gem bust ledge marble"),
    "metal": _words("key coin nail pan chain anchor hook pin can lock tray wire bell medal spring gear"),
    "glass": _words("cup bottle window mirror vase jar lamp lens bowl bulb plate globe prism beaker pitcher dome"),
    "cloth": _words("shirt hat sock towel scarf coat dress flag blanket curtain tent rug apron cape napkin pillow"),
    "paper": _words("book letter card map poster ticket note page kite stamp bill list novel diary poem menu"),
    "rubber": _words("ball tire boot mat pipe belt seal cap ring glove mask cushion eraser hose balloon raft"),
    "plastic": _words("toy comb bucket straw phone pen case cube fork spoon tube doll ruler dice whistle button"),
}
MATERIALS = tuple(OBJECTS_BY_MATERIAL)
MATERIAL_OF = {thing: material for material, things in OBJECTS_BY_MATERIAL.items() for thing in things}
OBJECTS = tuple(MATERIAL_OF)

# What happens to a thing: event -> (how it is said, {effect: materials}). Effects follow "it will ..." .
EVENTS: dict[str, tuple[str, dict[str, str]]] = {
    "drop": (
        "drops {} on the floor",
        {
            "break into pieces": "glass stone",
            "make a loud noise": "wood metal",
            "jump up again": "rubber plastic",
            "land without noise": "cloth paper",
        },
    ),
    "water": (
        "throws {} into the lake",
        {"float on the water": "wood rubber plastic paper", "sink to the bottom": "stone metal glass cloth"},
    ),
    "fire": (
        "puts {} into the fire",
        {
            "burn to ash": "wood paper cloth",
            "melt with smoke": "rubber plastic",
            "glow in the heat": "stone metal glass",
        },
    ),
    "press": (
        "sits on {} for long",
        {
            "bend without harm": "cloth paper rubber",
            "crack in half": "glass plastic",
            "hold the weight": "wood stone metal",
        },
    ),
    "wind": (
        "leaves {} in the storm",
        {"fly away fast": "cloth paper plastic", "stay in place": "wood stone metal glass rubber"},
    ),
}
# Verb forms for effects that have happened: first word of the effect -> past tense.
PAST = dict(
    pair.split(":")
    for pair in _words(
        "break:broke make:made jump:jumped land:landed float:floated sink:sank burn:burned melt:melted "
        "glow:glowed bend:bent crack:cracked hold:held fly:flew stay:stayed"
    )
)
EFFECT = {
    (event, material): effect
    for event, (_, effects) in EVENTS.items()
    for effect, materials in effects.items()
    for material in materials.split()
}

# What a job on a thing needs: verb -> material -> tool.
_TOOLS = {
    "cut": "wood:saw stone:chisel metal:torch glass:diamond cloth:scissors paper:scissors rubber:knife plastic:knife",
    "repair": "wood:hammer stone:cement metal:torch glass:glue cloth:needle paper:glue rubber:tape plastic:tape",
    "clean": "wood:oil stone:brush metal:polish glass:vinegar cloth:soap paper:brush rubber:sponge plastic:sponge",
    "color": "wood:paint stone:chalk metal:spray glass:marker cloth:dye paper:pencil rubber:marker plastic:spray",
    "move": "wood:rope stone:crane metal:magnet glass:foam cloth:basket paper:folder rubber:rope plastic:basket",
}
VERBS = tuple(_TOOLS)
TOOL = {(verb, pair.split(":")[0]): pair.split(":")[1] for verb, pairs in _TOOLS.items() for pair in pairs.split()}

# animal: food, home, sound, cover
_ANIMALS = {
    "cow": "grass barn moo hair",
    "horse": "hay stable neigh hair",
    "pig": "corn barn oink skin",
    "dog": "meat house bark fur",
    "cat": "fish house meow fur",
    "duck": "bread pond quack feathers",
    "hen": "seeds coop cluck feathers",
    "owl": "mice tree hoot feathers",
    "bee": "honey hive buzz hair",
    "frog": "flies pond croak skin",
    "lion": "meat plain roar fur",
    "wolf": "meat forest howl fur",
    "bear": "honey cave growl fur",
    "snake": "mice desert hiss scales",
    "sheep": "grass hill baa wool",
    "goat": "leaves hill bleat hair",
    "mouse": "cheese hole squeak fur",
    "crow": "corn tree caw feathers",
    "fox": "hens forest yelp fur",
    "whale": "shrimp sea sing skin",
    "shark": "fish sea splash scales",
    "donkey": "hay stable bray hair",
    "monkey": "fruit jungle chatter fur",
    "parrot": "fruit jungle talk feathers",
    "lizard": "flies desert click scales",
    "rabbit": "leaves hole thump fur",
    "swan": "bread lake trumpet feathers",
    "camel": "leaves desert grunt hair",
    "goose": "seeds lake honk feathers",
    "turtle": "shrimp lake hum scales",
    "llama": "grass mountain spit wool",
    "eagle": "mice mountain scream feathers",
}
ANIMALS = {
    animal: dict(zip(("food", "home", "sound", "cover"), facts.split(), strict=True))
    for animal, facts in _ANIMALS.items()
}

# job: what it makes or gives, what it is done with
_JOBS = {
    "baker": "cakes oven",
    "farmer": "milk tractor",
    "tailor": "suits thread",
    "smith": "swords forge",
    "painter": "pictures canvas",
    "teacher": "lessons board",
    "doctor": "pills needle",
    "writer": "stories ink",
    "cook": "soup stove",
    "miner": "coal lantern",
    "fisher": "shrimp net",
    "singer": "songs piano",
    "builder": "houses crane",
    "judge": "laws hammer",
    "pilot": "flights plane",
    "barber": "haircuts razor",
    "gardener": "flowers shovel",
    "dentist": "teeth drill",
    "hunter": "meat bow",
    "clown": "jokes wig",
}
JOBS = {job: dict(zip(("product", "tool"), facts.split(), strict=True)) for job, facts in _JOBS.items()}

ACTIVITIES = _words(
    "cooking fishing painting camping baking reading swimming sewing washing hiking packing skating planting dancing "
    "sailing training climbing knitting skiing studying shopping cycling riding drawing"
)
STEPS = _words(
    "opens the door|takes a bag|fills the bottle|cleans the table|calls a friend|lights a candle|closes the window|"
    "writes a list|counts the coins|turns on the lamp|puts on a coat|drinks some water|eats an apple|moves the chair|"
    "looks at the map|waits a minute|sits on the bench|ties a rope|washes the hands|sings a song|cuts some bread|"
    "goes up the hill|rests for an hour|says good night|feeds the birds|reads the paper|sweeps the floor|"
    "boils the water|folds the blanket|buys a ticket|rings the bell|climbs the stairs",
    "|",
)
STEPS_PER_SCRIPT = 6


def held_out(*words: str) -> bool:
    """Say whether this combination is kept for evaluation (one in six), so never in the corpus. Order is ignored."""
    return hashlib.sha256("/".join(sorted(words)).encode()).digest()[0] % 6 == 0


def _scripts() -> dict[str, list[str]]:
    """Return each activity's steps. Every step occurs in several activities, with different followers."""
    rng = random.Random("scripts")
    pool: list[str] = []
    scripts = {}
    for activity in ACTIVITIES:
        steps: list[str] = []
        while len(steps) < STEPS_PER_SCRIPT:
            if not pool:
                pool = rng.sample(STEPS, len(STEPS))
            step = pool.pop()
            if step not in steps:
                steps.append(step)
        scripts[activity] = steps
    return scripts


def _objects_facts() -> dict[str, dict[str, str]]:
    rng = random.Random("facts")
    return {
        thing: {"material": MATERIAL_OF[thing], "color": rng.choice(COLORS), "room": rng.choice(ROOMS)}
        for thing in OBJECTS
    }


SCRIPTS = _scripts()
FACTS = _objects_facts()


def effect(event: str, thing: str) -> str:
    """Return what happens to the thing, e.g. "float on the water"."""
    return EFFECT[event, MATERIAL_OF[thing]]


def past(effect_phrase: str) -> str:
    """Return the effect as something that has happened, e.g. "floated on the water"."""
    verb, rest = effect_phrase.split(" ", 1)
    return f"{PAST[verb]} {rest}"


def tool(verb: str, thing: str) -> str:
    """Return the tool with which `verb` is done to the thing."""
    return TOOL[verb, MATERIAL_OF[thing]]
